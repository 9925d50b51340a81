"""One file per algorithm. The tables below are what ``--agent NAME`` looks up."""

PPO = "ludus.agents.ppo:PPO"
DQN = "ludus.agents.dqn:DQN"
DDPG = "ludus.agents.ddpg:DDPG"
SAC = "ludus.agents.sac:SAC"
ACER = "ludus.agents.acer:ACER"
AGENTS = {
    "a2c": "ludus.agents.actor_critic:ActorCritic",
    "a3c": "ludus.agents.a3c:A3C",
    "ppo": PPO,
    "appo": PPO,
    "vtrace": "ludus.agents.vtrace:ActorCriticVTrace",
    "trpo": "ludus.agents.trpo:TRPO",
    "reinforce": "ludus.agents.reinforce:REINFORCE",
    "bc": "ludus.agents.bc:BC",
    "dagger": "ludus.agents.dagger:DAgger",
    "gail": "ludus.agents.gail:GAIL",
    "gail_trpo": "ludus.agents.gail:GAILTRPO",
    "ars": "ludus.agents.ars:ARS",
    "pqn": "ludus.agents.pqn:PQN",
    "dqn": DQN,
    "double_dqn": DQN,
    "dueling_dqn": DQN,
    "c51": DQN,
    "qr_dqn": DQN,
    "iqn": DQN,
    "munchausen_dqn": DQN,
    "rainbow": DQN,
    "r2d2": DQN,
    "ddpg": DDPG,
    "hddpg": DDPG,
    "td3": DDPG,
    "sac": SAC,
    "tqc": SAC,
    "droq": SAC,
    "crossq": SAC,
    "discrete_sac": "ludus.agents.sac_discrete:DiscreteSAC",
    "acer": ACER,
    "acer_vtrace": ACER,
}
CONFIGS = {  # known combinations of an agent's settings: other defaults
    "appo": "ludus.agents.ppo:APPOConfig",
    "gail_trpo": "ludus.agents.gail:GAILTRPOConfig",
    "double_dqn": "ludus.agents.dqn_family:DoubleDQNConfig",
    "dueling_dqn": "ludus.agents.dqn_family:DuelingDQNConfig",
    "c51": "ludus.agents.dqn_family:C51Config",
    "qr_dqn": "ludus.agents.dqn_family:QRDQNConfig",
    "iqn": "ludus.agents.dqn_family:IQNConfig",
    "munchausen_dqn": "ludus.agents.dqn_family:MunchausenDQNConfig",
    "rainbow": "ludus.agents.dqn_family:RainbowConfig",
    "r2d2": "ludus.agents.dqn_family:R2D2Config",
    "hddpg": "ludus.agents.ddpg:HDDPGConfig",
    "td3": "ludus.agents.ddpg:TD3Config",
    "tqc": "ludus.agents.sac_family:TQCConfig",
    "droq": "ludus.agents.sac_family:DroQConfig",
    "crossq": "ludus.agents.sac_family:CrossQConfig",
    "acer_vtrace": "ludus.agents.acer:ACERVTraceConfig",
}
