"""The pages for newcomers from other libraries name everything, and what they point at exists."""

import importlib
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("coming_from.md", "coming_from_sb3.md", "parallel.md")]

# What the documents of the four systems name.
NAMES = {
    "adept": """
        Container LocalWorker DistribWorker ImpalaHost ImpalaWorkerCPU ImpalaWorkerGPU Agent ActorCritic VTrace
        ActorCriticVTrace ACER ACERVTrace DQN ExperienceCache ExperienceReplay RolloutBuffer RolloutCache
        Environment GymEnv SC2Feat1DEnv SC2Feat3DEnv SC2RawEnv EnvironmentManager SimpleEnvManager SubProcEnvManager
        Network NetworkModule ModularNetwork CustomNetwork SubModule SubModule1D SubModule2D SubModule3D SubModule4D
        Identity1D Identity2D Identity3D Identity4D LSTM TransformerEnc TransformerDec SC2LEEncoder SC2LEDecoder
        ConvLSTM ObsPreprocessor obs_preprocessor_cpu obs_preprocessor_gpu action_preprocessor HiddenState detach
        env_cls local_step_count reward_buffer hidden_state run nb_step initial_step output_space observe act step
        compute_loss step_train step_eval reset close read write env_write agent_write ready submit receive forward
        input_shape output_shape policy_dict policy_logits experience_cache exp_cache env agent network source body
        heads ObsName ActionName ExpName LossName MetricName HSName Id Shape Observations Rewards Terminals Infos
        LogProb Entropy""",
    "rlpyt": """
        build_and_train game run_ID cuda_idx sampler algo runner config train RLAlgorithm n_itr batch_spec
        mid_batch_reset examples world_size rank PolicyGradientAlgo process_returns samples return_ advantage valid
        OptInfo gradNorm perplexity AgentTrain dist_info value PPO optimize_agent itr opt_info prev_action
        prev_reward loss agent_inputs old_dist_info init_rnn_state distribution BaseSampler EnvCls batch_T batch_B
        CollectorCls obtain_samples evaluate_agents BaseCollector envs samples_np TrajInfoCls start_envs start_agent
        collect_batch traj_infos SerialSampler Env observation_space action_space spaces horizon BaseRunner
        namedarraytuple""",
    "rsl_rl": """
        algorithms ppo init_storage act process_env_step compute_returns update RolloutStorage transition vec_env
        actor_critic actor_critic_recurrent networks memory reset forward detach_hidden_states runners
        on_policy_runner learn log save load get_inferece_policy storage rollout_storage add_transitions Transition
        observations critic_observations actions rewards dones values actions_log_prob action_mean action_sigma
        hidden_states clear _save_hidden_states get_statistics mini_batch_generator recurrent_mini_batch_generator
        replay_buffer states_buffer buffer_size insert feed_forward_generator resolve_nn_activation
        split_and_pad_trajectories runner_builder buffer_from_example ckpt_manipulator source_state_dict
        algo_state_dict collections namedarraytuple namedtuple namedtupleschema is_namedarraytuple LstmHiddenState
        ActorCriticHiddenState data_compresser compress_normalized_image get_minibatch_from_indices T_slices
        B_slices padded_B_slice obs_mask_batch Memory compute_losses state_dict load_state_dict
        lr_scheduler_state_dict current_learning_iteration""",
    "Machin": """
        machin.env machin.env.utils machin.env.wrappers machin.frame machin.frame.algorithms machin.frame.buffers
        machin.frame.helpers machin.frame.noise machin.model ResNet NeuralNetworkModule machin.parallel
        machin.parallel.thread machin.parallel.process machin.parallel.queues machin.parallel.pool
        machin.parallel.assigner machin.parallel.server machin.parallel.distributed A3C DQNApex DDPGApex IMPALA
        machin.utils machin.utils.checker machin.utils.conf machin.utils.helper_classes Timer Counter
        machin.utils.learning_rate machin.utils.loading machin.utils.media machin.utils.prepare
        machin.utils.save_env machin.utils.visualize machin.utils.tensorboard""",
}


def section(system):
    parts = re.split(r"^## ", PAGES[0].read_text(encoding="utf-8"), flags=re.MULTILINE)
    return next(part for part in parts if part.startswith(system))


@pytest.mark.parametrize("system", NAMES)
def test_every_name_has_a_row(system):
    rows = [line.split("|")[1] for line in section(system).splitlines() if line.startswith("|")]
    said = set(re.findall(r"[\w.]+", " ".join(rows))) | set(re.findall(r"\w+", " ".join(rows)))
    assert [name for name in NAMES[system].split() if name not in said] == []


def exists(dotted):
    """Whether a dotted path is a module, or an attribute, method or dataclass field in one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return has(found, parts[cut:])
    return False


def has(thing, path):
    for name in path:
        if is_dataclass(thing) and name in {f.name for f in fields(thing)}:
            return True
        if not hasattr(thing, name):
            return False
        thing = getattr(thing, name)
    return True


def pointers(page):
    """Each path in a line that does not speak of later work: (line number, path)."""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if "later" not in line:
            for code in re.findall(r"`([^`]+)`", line):
                if re.fullmatch(r"ludus(\.\w+)+", code) or re.fullmatch(
                    r"(ludus|docs|examples|tests)(/[\w.]+)+/?", code
                ):
                    yield number, code


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_what_the_page_points_at_exists(page):
    found = list(pointers(page))
    assert len(found) > 5
    missing = [(n, code) for n, code in found if not ((ROOT / code).exists() if "/" in code else exists(code))]
    assert missing == []


def test_sb3_settings_have_their_names_here():
    """The tables of settings: every ``agent.x``, ``env.x``, … in backticks is a setting of PPO or A2C."""
    from ludus.agents import AGENTS
    from ludus.settings.settings import setting_types

    known = {key for name in AGENTS for key in setting_types(name)}
    text = PAGES[1].read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:agent|env|network|evaluation)\.[a-z_]+)`", text))
    assert len(named) > 15
    assert named <= known
