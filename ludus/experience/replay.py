"""Replay buffer: the last N steps of B environments, for off-policy agents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.cache import ExperienceCache, Unroll
from ludus.core.hidden_state import HiddenState
from ludus.core.schedule import Schedule, value_at
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors
from ludus.core.updater import Updater
from ludus.experience.config import ReplayConfig
from ludus.experience.frames import FrameStorage
from ludus.experience.hindsight import ACHIEVED, Hindsight, RewardFunction, check_hindsight
from ludus.experience.memory import check_memory, free_bytes, replay_bytes
from ludus.experience.priorities import Priorities
from ludus.experience.reader import Reader
from ludus.experience.rollout import select_prefix
from ludus.experience.storage import FINAL, FLAGS, Integers, PackedFlags, Ring, RowGroup, SlotIndex, as_numpy
from ludus.ops.returns import running_returns

PAUSE = 32  # env steps after which control returns to the container, while updates are rarer than that
ONE_UPDATE = 1 - 1e-9  # credit of an update: 1, less the rounding error of sums such as 10 × 0.1
NOTHING: Integers = np.zeros(0, np.int64)


class ExperienceReplay(ExperienceCache):
    """A ring buffer per tensor, in native types, from which transitions or sequences are drawn.

    Reward and flags are stored with the observation that they came with, as in EnvStep, and so are the final
    observations of same-step resets. Only transitions that are real and complete can be drawn: each group of rows has
    a queue of them, so no draw is rejected. A truncated transition without a known final observation cannot be drawn,
    since its successor is unknown; within a sequence it counts as padding. A batch is valid until the next ``read``.
    With ``window``, n-step transitions also include their intermediate states. ``ranks`` are the processes that learn
    together; ``config`` holds this one's part (``ReplayConfig.for_rows``).
    """

    def __init__(
        self,
        config: ReplayConfig,
        batch: int,
        gamma: float,
        observation: Specs,
        device: torch.device,
        reward_fn: RewardFunction | None = None,
        action: Specs | None = None,
        state: HiddenState | None = None,
        window: bool = False,
        ranks: int = 1,
    ) -> None:
        config.check_replay_size(batch, device)
        check_hindsight(config, observation, reward_fn)
        self.bytes = replay_bytes(config, batch, observation, action, state)
        self.config, self.batch, self.device = config, batch, device
        self._given_gamma, self.gamma = gamma, value_at(gamma, 0.0)  # may be a schedule
        self._ranks = ranks
        self._check_memory(self.bytes)
        self.length = config.replay // batch
        self.generator: torch.Generator = torch.Generator()
        self.updates_per_step = config.updates_per_step * ranks  # per step of this process
        self.importance_exponent = config.importance_exponent
        self._stride, self._span = config.stride, config.span
        self._ring = Ring(self.length, batch, device, config.replay_folder)
        self._ring.add(FLAGS, (), PackedFlags.DTYPE)
        self._flags = PackedFlags(self._ring.columns[FLAGS])
        self._hidden = Ring(self.length // self._stride + 2, batch, device)  # hidden states where sequences start
        self._frames = {
            name: FrameStorage(spec, self.length, batch, self._span, device, config.replay_folder)
            for name, spec in observation.items()
            if spec.stack > 1
        }
        self._unstacked = [name for name in observation if name not in self._frames]
        self._agent_keys: list[tuple[int, str]] = []  # (field, name) in AgentStep of each agent column
        self._drawable = np.zeros((batch, self.length), np.bool_)  # whether the transition that led to a step is
        self._slot_index = SlotIndex(self.length, batch)
        self._positions = torch.zeros(config.batch_size, dtype=torch.int64)  # of the items that are drawn
        self._groups: dict[int, RowGroup] = {}  # by first row
        self._priorities = Priorities(self._slot_index, config.priority_exponent) if config.prioritized else None
        self._hindsight = None
        if config.hindsight and reward_fn is not None:
            goals = self._frames.get(ACHIEVED)
            self._hindsight = Hindsight(config.hindsight, self._slot_index, self._ring, goals, reward_fn)
        self._real, self._earning, self._reads, self._credit = 0, 0, 0, 0.0
        self._agreed = False  # whether the credit is the same on all ranks, since the last step
        storage = self._ring, self._hidden, self._frames, self._hindsight
        self._reader = Reader(config, self.gamma, list(observation), self._slot_index, *storage, window)

    @property
    def max_bytes(self) -> int:
        """The bytes of the replay if whole stacks of frames have to be stored."""
        return self.bytes + sum(frames.whole_bytes - frames.bytes for frames in self._frames.values())

    @property
    def saved_within_update(self) -> bool:
        """Transitions are complete at any time."""
        return self.config.save_replay

    @property
    def size(self) -> int:
        """How many transitions, or sequences, can be drawn."""
        return sum([group.size for group in self._groups.values()])

    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        """Write a step at the next slot, and make the items that it completes drawable."""
        group = self._groups.get(start)
        if group is None:
            group = self._add_rows(slice(start, start + len(step.first)), step.observation)
        group.time += 1
        time, slot = group.time, group.time % self.length
        if step is not group.env_step:  # managers overwrite the same step, so its arrays are usually known
            flags = step.first, step.real, step.reward, step.terminated, step.truncated
            arrays = [as_numpy(x) for x in (*flags, *(step.observation[name] for name in self._unstacked))]
            group.env_step, group.env_arrays = step, arrays
        for column, x in zip(group.env_columns, group.env_arrays, strict=True):
            column[:, slot] = x
        first, real = (x if isinstance(x, np.ndarray) else x.cpu().numpy() for x in group.env_arrays[:2])
        if step.final is not None and not self.config.sequence:
            self._write_final(group, step.final)
        drawable = real
        if not self._reader.has_finals and 1 in (real & first).tobytes():  # same-step resets with unknown successors
            drawable = real & ~(first & ~step.terminated.cpu().numpy())
        self._drawable[group.rows, slot] = drawable
        self._slot_index.now[group.rows] = time
        for name, frames in self._frames.items():
            frames.write(group.row_numbers, time, step.observation[name], first)
        if self._hindsight is not None:
            self._hindsight.check(start, step, first)
            self._hindsight.write(group.row_numbers, time, first)
        if self.config.sequence and time % self._stride == 0:
            self._write_hidden(group, time, state)
        self._expire(group)
        if self._frames:
            self._check_stacks()
        if time - self._span >= group.oldest:
            self._make_drawable(group, time - self._span)
        if time:
            self._earn_credit(group, int(np.count_nonzero(real)))

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """Write action and experience at the slot of the last observation."""
        group = self._groups[start]
        slot = group.time % self.length
        if not group.agent_columns:
            for kind, tensors in (("action", step.action), ("experience", step.experience)):
                for name, x in tensors.items():
                    self._ring.add(f"{kind}/{name}", tuple(x.shape[1:]), x.dtype)
            self._find_agent_columns(group)
        for (field, name), column in zip(self._agent_keys, group.agent_columns, strict=True):
            column[:, slot] = as_numpy(step[field][name])

    def receive(self, unroll: Unroll) -> None:
        """Write all steps of a worker's unroll at once, and make the items that they complete drawable.

        If unrolls of its rows are missing before it, no transition leads to it. Among its tensors, ``td_error`` is the
        |δ| of the item that each step completes, or NaN.
        """
        given = unroll.tensors
        observation = {name: given[f"observation/{name}"] for name in (*self._unstacked, *self._frames)}
        group = self._groups.get(unroll.rows.start)
        if group is None:
            group = self._add_rows(unroll.rows.slice, {name: x[0] for name, x in observation.items()})
        # steps to write before its second observation: its first one at the next time at which a sequence may start
        gap = self._stride - group.time % self._stride
        if group.time >= 0 and unroll.number == group.unroll + 1:  # it follows the last one, with the same observation
            gap = 0
        group.unroll = unroll.number
        times = np.arange(group.time + 1, group.time + gap + len(given["first"]))
        flags = {name: _after_gap(given[name], gap) for name in ("reward", "terminated", "truncated", "real")}
        flags["first"] = _after_gap(given["first"][1:], gap)
        flags["first"][max(gap - 1, 0) : gap] = given["first"][:1]
        seen = {name: x[1:] for name, x in observation.items()}
        if gap:
            seen = {name: torch.cat([observation[name][:1].expand(gap, *x.shape[1:]), x]) for name, x in seen.items()}
        acted = {name: x for name, x in given.items() if name.startswith(("action/", "experience/"))}
        final = {name: x for name, x in given.items() if name.startswith(FINAL) and not self.config.sequence}
        for name, frames in self._frames.items():
            if (x := final.get(FINAL + name)) is not None:
                newest = frames.newest(x.flatten(0, 1))
                final[FINAL + name] = newest.view(*x.shape[:2], *newest.shape[1:])
        if final:
            self._add_finals({name.removeprefix(FINAL): x[0] for name, x in final.items()})
        for name, x in acted.items():
            self._ring.add(name, tuple(x.shape[2:]), x.dtype)
        columns = self._ring.columns
        self._write_steps(group, times, [(getattr(self._flags, name), x) for name, x in flags.items()])
        self._write_steps(group, times, [(columns[f"observation/{name}"], seen[name]) for name in self._unstacked])
        self._write_steps(group, times[gap:] - 1, [(columns[name], x) for name, x in acted.items()])
        self._write_steps(group, times[gap:], [(columns[name], x) for name, x in final.items()])
        drawable = flags["real"]
        if not self._reader.has_finals:
            drawable = drawable & ~(flags["first"] & ~flags["terminated"])
        self._drawable[group.rows, times % self.length] = drawable.T.numpy()
        if self.config.sequence:
            self._write_hidden(group, int(times[gap]) - 1, select_prefix(given, "state"))
        for i, time in enumerate(times.tolist() if self._frames or self._hindsight else ()):
            first = flags["first"][i].numpy()
            for name, frames in self._frames.items():
                frames.write(group.row_numbers, time, seen[name][i].to(self.device), first)
            if self._hindsight is not None:
                self._hindsight.write(group.row_numbers, time, first)
        group.time = int(times[-1])
        self._slot_index.now[group.rows] = group.time
        self._expire(group)
        self._check_stacks()
        self._make_received_drawable(group, times, gap, given.get("td_error"))
        self._earn_credit(group, int(flags["real"].sum()))

    def _make_received_drawable(self, group: RowGroup, times: Integers, gap: int, td_error: Tensor | None) -> None:
        """Make the items drawable that the steps at these times complete; ``td_error`` is of those after the gap."""
        priorities = self._priorities
        if td_error is None or priorities is None:
            self._make_all_drawable(group, times - self._span)
            return
        for i, time in enumerate(times.tolist()):
            if time - self._span < group.oldest:
                continue
            items = torch.from_numpy(self._make_drawable(group, time - self._span))
            if i >= gap:
                error = td_error[i - gap][items % self.batch - group.rows.start]
                known = ~error.isnan()
                priorities.update(items[known], error[known])

    def _write_steps(self, group: RowGroup, times: Integers, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Write tensors ``[steps, B, …]`` to their columns at these times."""
        slots = torch.from_numpy(times % self.length).to(self.device)
        for column, x in pairs:
            column[group.rows].index_copy_(1, slots, x.to(self.device).transpose(0, 1))

    def ready(self) -> bool:
        """Whether enough steps have been taken for another update."""
        return self._credit >= ONE_UPDATE and self.size > 0

    def agree(self, updater: Updater) -> bool:
        """Average the credit over ranks, whose numbers of real steps differ, and return whether all are ready.

        Then it is the same on all ranks until the next step, so the following answers need no exchange.
        """
        if updater.ranks > 1 and not self._agreed:
            mine = torch.tensor([self._credit, self.size > 0], dtype=torch.float64)
            credit, filled = updater.sum(mine).tolist()
            self._credit = credit / updater.ranks
            if filled < updater.ranks:
                return False
        self._agreed = self.ready()
        return self._agreed

    def accepts(self, start: int) -> bool:
        """Whether these rows may step again; while updates are rare, the container gets control every 32 env steps.

        That depends on saved state alone, not on a clock or a signal, since schedules are updated at every pause.
        """
        rare = not self._earning or self.updates_per_step * PAUSE < 1
        pauses = rare and self._groups[start].time % max(1, PAUSE // self.batch) == 0
        return not pauses and not self.ready()

    def read(self) -> Batch:
        """Draw a batch, which is valid until the next one; ``index`` is on the CPU."""
        self._credit -= 1
        self._reads += 1
        if self._priorities is None:
            return self._reader.read(self._draw_uniform(), None, self.generator)
        # the weights are (N·P)^−β over the largest of the batch, in which N and Σp cancel
        numbers, ratio = self._priorities.draw(self.config.batch_size, self.generator)
        return self._reader.read(numbers, ratio.pow_(-self.importance_exponent), self.generator)

    def fresh(self, names: Sequence[str], with_returns: bool = False) -> tuple[Tensors, Tensor | None]:
        """Return the observations ``[n, …]`` of real steps since the last call, each as it was before its action.

        The second result is None, or ``with_returns`` the running discounted returns ``[n]`` after these steps. Steps
        that have been overwritten since are left out.
        """
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        returns, flags = [torch.zeros(0, dtype=torch.float64, device=self.device)], self._flags
        for group in self._groups.values():
            start = max(group.fresh, group.oldest)
            times, after = np.arange(start, group.time), np.arange(start + 1, group.time + 1) % self.length
            real = flags.real[group.rows, after]  # [b, T]
            for name, parts in found.items():
                parts.append(self._ring.columns[f"observation/{name}"][group.rows, times % self.length][real])
            if with_returns and len(times):
                reward, terminated, truncated = (
                    x[group.rows, after].T for x in (flags.reward, flags.terminated, flags.truncated)
                )
                carried = group.carried if start == group.fresh else torch.zeros_like(group.carried)
                computed, group.carried = running_returns(reward, terminated | truncated, real.T, self.gamma, carried)
                returns.append(computed.T[real])
            group.fresh = max(group.fresh, group.time)
        return {name: torch.cat(parts) for name, parts in found.items()}, torch.cat(returns) if with_returns else None

    def feedback(self, index: Tensor, priority: Tensor) -> None:
        """Set priorities from the |δ| of what was read; items that were overwritten since are ignored."""
        if self._priorities is not None:
            self._priorities.update(index.cpu(), priority.detach().cpu())

    def schedule(self, progress: float) -> None:
        """Set what the schedules give; by default the exponent of importance weights goes from its value to 1."""
        config, start = self.config, self.config.importance_exponent
        if (gamma := value_at(self._given_gamma, progress)) != self.gamma:
            self.gamma = gamma
            self._reader.set_gamma(gamma)
        self.updates_per_step = value_at(config.updates_per_step, progress) * self._ranks
        to_one = start + (1 - start) * progress
        self.importance_exponent = start.at(progress) if isinstance(start, Schedule) else to_one
        if self._hindsight is not None:
            self._hindsight.fraction = value_at(config.hindsight, progress)

    def metrics(self) -> dict[str, float]:
        """Return metrics for logging; updates are counted per real step of all ranks after the warm-up."""
        values = {"replay/size": float(self.size * self._ranks)}
        if (past := self._real - self.config.warmup) > 0:
            values["replay/updates_per_step"] = self._reads / (past * self._ranks)
        if self._priorities is not None:
            values["replay/importance_exponent"] = self.importance_exponent
            values["replay/largest_priority"] = self._priorities.largest
        return values

    def amend(self, step: EnvStep) -> None:
        """Overwrite the last observation of every row; transitions to an episode that was lost are not drawn."""
        for group in self._groups.values():
            rows, here = step.rows(group.rows), (group.rows, group.time % self.length)
            first, real = rows.first.cpu().numpy(), rows.real.cpu().numpy()
            was_first = self._flags.first[here].cpu().numpy().copy()
            self._flags.first[here] = rows.first
            self._flags.real[here] &= rows.real
            for name in self._unstacked:
                self._ring.columns[f"observation/{name}"][here] = rows.observation[name]
            self._drawable[here] &= real
            for name, frames in self._frames.items():
                frames.amend(group.row_numbers, group.time, rows.observation[name], first, was_first)
            if self._hindsight is not None:
                begun = first & ~was_first
                self._hindsight.write(group.row_numbers[begun], group.time, begun[begun])
            if group.fresh == group.time:  # else the steps that are not counted yet end the running return
                group.carried = group.carried.masked_fill(rows.first, 0)
            if self._span == 1 and not self.config.sequence:
                newest = group.take_back((group.time - 1) * self.batch)
                lost = np.isin(newest % self.batch, group.row_numbers[~real])
                group.push(newest[~lost])
                if self._priorities is not None:
                    self._priorities.drop(torch.from_numpy(newest[lost]))
            self._expire(group)

    def state_dict(self) -> State:
        """Return the filled part of the ring and all counters; without ``save_replay``, the last step alone."""
        return {
            "generator": self.generator.get_state(),
            "whole": self.config.save_replay,
            "counters": [self._real, self._earning, self._reads, self._credit],
            "largest": self._priorities.largest if self._priorities is not None else None,
            "groups": [self._save(group) for group in self._groups.values()],
        }

    def load_state_dict(self, state: State) -> None:
        """Load what ``state_dict`` returned; time continues, so that numbers of items stay unique."""
        self.generator.set_state(state["generator"])
        self._groups = {}
        if state["whole"]:
            self._real, self._earning, self._reads, self._credit = state["counters"]
        if self._priorities is not None:
            self._priorities = Priorities(self._slot_index, self.config.priority_exponent)
            self._priorities.largest = state["largest"] or 1.0  # None: the run had no priorities before
        for saved in state["groups"]:
            self._load(saved)

    def _add_rows(self, rows: slice, observation: Tensors) -> RowGroup:
        """Add the first group of these rows, whose observations ``[B, …]`` are like the given ones."""
        for name in self._unstacked:
            self._ring.add(f"observation/{name}", tuple(observation[name].shape[1:]), observation[name].dtype)
        return self._add_group(rows)

    def _add_group(self, rows: slice) -> RowGroup:
        capacity = (rows.stop - rows.start) * (self.length // self._stride + 1)
        group, flags = RowGroup(rows, capacity, self.device), self._flags
        columns = [flags.first, flags.real, flags.reward, flags.terminated, flags.truncated]
        columns += [self._ring.columns[f"observation/{name}"] for name in self._unstacked]
        group.env_columns = [as_numpy(x[rows]) for x in columns]
        self._groups = dict(sorted({**self._groups, rows.start: group}.items()))
        return group

    def _find_agent_columns(self, group: RowGroup) -> None:
        names = [name for name in self._ring.columns if name.startswith(("action/", "experience/"))]
        self._agent_keys = [(int(kind == "experience"), name) for kind, _, name in (x.partition("/") for x in names)]
        group.agent_columns = [as_numpy(self._ring.columns[name][group.rows]) for name in names]

    def _write_final(self, group: RowGroup, final: Tensors) -> None:
        """Store the final observations of episodes that were reset in the same step; of a stack, its newest frame."""
        final = {name: self._frames[name].newest(x) if name in self._frames else x for name, x in final.items()}
        self._add_finals(final)
        for name, x in final.items():
            self._ring.columns[FINAL + name][group.rows, group.time % self.length] = x

    def _add_finals(self, final: Tensors) -> None:
        """Allocate memory for final observations like these ``[B, …]``, unless it exists."""
        if not self._reader.has_finals:
            needed = sum(self.batch * self.length * x[0].numel() * x.element_size() for x in final.values())
            self._check_memory(needed, "The environments reset in the same step, and storing final observations too ")
            for name, x in final.items():
                self._ring.add(FINAL + name, tuple(x.shape[1:]), x.dtype)
            self.bytes += needed

    def _write_hidden(self, group: RowGroup, time: int, state: Tensors) -> None:
        """Store the hidden state of a sequence that starts at ``time``."""
        for name, x in state.items():
            self._hidden.add(name, tuple(x.shape[1:]), x.dtype)
            self._hidden.columns[name][group.rows, time // self._stride % self._hidden.length] = x

    def _check_stacks(self) -> None:
        """Store whole stacks of frames from now on where one was not the one before it shifted by one."""
        for name, frames in self._frames.items():
            if frames.irregular and not frames.whole:
                self._store_whole_stacks(name)
                self.on_warning(
                    f'Observation "{name}": a stack of {frames.stack} frames was not the one before it shifted by one, '
                    "as under a wrapper around the frame stack that skips frames. The replay stores whole stacks and "
                    f"will take {self.bytes / 1e6:,.1f} MB when it is full; with the frame stack as the outermost "
                    "wrapper it stores each frame once."
                )

    def _expire(self, group: RowGroup) -> None:
        """Remove the items of which a part has been overwritten."""
        oldest = max(group.oldest, group.time - self.length + 1)
        for frames in self._frames.values():
            oldest = frames.oldest(group.rows, oldest, group.time)
        if oldest > group.oldest:
            group.oldest = self._slot_index.oldest[group.rows] = oldest
            expired = group.expire(oldest * self.batch)
            if self._priorities is not None and len(expired):
                self._priorities.drop(torch.from_numpy(expired))

    def _store_whole_stacks(self, name: str) -> None:
        """Store whole stacks of an observation from now on; refuse if there is not enough memory for them."""
        frames = self._frames[name]
        for group in self._groups.values():
            self._expire(group)  # steps that the smaller stream has overwritten
        needed, total = frames.whole_bytes, self.bytes + frames.whole_bytes - frames.bytes
        if self.device.type == "cpu" and not self.config.replay_folder:  # pages are allocated when they are written
            filled = max((min(1.0, group.time / self.length) for group in self._groups.values()), default=0.0)
            needed = total - int(filled * self.bytes)
        self._check_memory(
            needed,
            f'Observation "{name}": a stack of {frames.stack} frames was not the one before it shifted by one, so the '
            "replay stores whole stacks, for which ",
        )
        frames.store_whole_stacks()
        self.bytes = total

    def _check_memory(self, needed: int, why: str = "") -> None:
        folder = self.config.replay_folder
        check_memory(needed, free_bytes(self.device, folder), folder, self.device.type, why)

    def _make_drawable(self, group: RowGroup, time: int) -> Integers:
        """Add the items that start at ``time``, real transitions or sequences, to the queue; return their numbers.

        They get the largest priority so far.
        """
        if time % self._stride:
            return NOTHING
        rows = group.row_numbers
        if not self.config.sequence:
            rows = rows[self._drawable[group.rows, (time + 1) % self.length]]
        numbers = rows + time * self.batch
        group.push(numbers)
        if self._priorities is not None:
            self._priorities.add(torch.from_numpy(numbers))
        return numbers

    def _make_all_drawable(self, group: RowGroup, times: Integers) -> None:
        """Do the same for the items that start at any of these times."""
        times = times[(times >= group.oldest) & (times % self._stride == 0)]
        numbers = times[:, None] * self.batch + group.row_numbers  # [T, B]
        if not self.config.sequence:
            numbers = numbers[self._drawable[group.rows][:, (times + 1) % self.length].T]
        numbers = numbers.reshape(-1)
        group.push(numbers)
        if self._priorities is not None:
            self._priorities.add(torch.from_numpy(numbers))

    def _earn_credit(self, group: RowGroup, real: int) -> None:
        """Count real steps; after the warm-up, each adds ``updates_per_step`` to the credit."""
        self._real += real
        over = min(real, self._real - self.config.warmup)
        # updates start when there is a full batch, or the ring is full and will never hold one
        if over > 0 and (self._earning or self.size >= self.config.batch_size or group.oldest > group.start_time):
            self._earning += over
            self._credit += over * self.updates_per_step

    def _draw_uniform(self) -> Tensor:
        drawn: Integers = self._positions.random_(self.size, generator=self.generator).numpy()
        if len(self._groups) == 1:
            return torch.from_numpy(next(iter(self._groups.values())).pick(drawn))
        numbers, low = np.empty_like(drawn), 0
        for group in self._groups.values():
            here = (drawn >= low) & (drawn < low + group.size)
            numbers[here] = group.pick(drawn[here] - low)
            low += group.size
        return torch.from_numpy(numbers)

    def _save(self, group: RowGroup) -> State:
        whole = self.config.save_replay
        rows, low = group.rows, group.oldest if whole else group.time
        numbers = torch.from_numpy(group.numbers[: group.size if whole else 0])
        starts = -(-low // self._stride), group.time // self._stride
        return {
            "start": rows.start,
            "stop": rows.stop,
            "time": group.time,
            "unroll": group.unroll,
            "low": low,
            "start_time": group.start_time if whole else group.time,
            "fresh": max(group.fresh, low),
            "carried": group.carried if group.fresh >= low else torch.zeros_like(group.carried),
            "steps": self._ring.save(rows, low, group.time),
            "hidden": self._hidden.save(rows, *starts) if starts[0] <= starts[1] else {},
            "frames": {name: frames.save(rows, low, group.time) for name, frames in self._frames.items()},
            "numbers": numbers,
            "priorities": None if self._priorities is None else self._priorities.get(numbers),
        }

    def _load(self, saved: State) -> None:
        time, rows = saved["time"], slice(saved["start"], saved["stop"])
        self._ring.load(rows, time, saved["steps"])
        self._hidden.load(rows, time // self._stride, saved["hidden"])
        for name, frames in self._frames.items():
            if saved["frames"][name]["whole"] and not frames.whole:
                self._store_whole_stacks(name)
            frames.load(rows, time, saved["frames"][name])
        group = self._add_group(rows)
        self._find_agent_columns(group)
        group.time, group.start_time, group.oldest = time, saved["start_time"], saved["low"]
        group.fresh, group.carried = saved["fresh"], saved["carried"].to(self.device)
        group.unroll = saved["unroll"]
        self._slot_index.now[rows], self._slot_index.oldest[rows] = time, saved["low"]
        flags = self._flags
        first, real, terminated = (x[rows].cpu().numpy() for x in (flags.first, flags.real, flags.terminated))
        self._drawable[rows] = real if self._reader.has_finals else real & ~(first & ~terminated)
        if self._hindsight is not None:
            times = np.arange(max(saved["low"], time - self.length + 1), time + 1)
            self._hindsight.restore(rows, int(times[0]), first[:, times % self.length])
        numbers, priorities = saved["numbers"], saved["priorities"]
        fits = numbers >= (time - self.length + 1) * self.batch  # this ring may be shorter
        group.push(numbers[fits].numpy())
        if self._priorities is not None:
            if priorities is None:
                self._priorities.add(numbers[fits])
            else:
                self._priorities.set(numbers[fits], priorities[fits])
        self._expire(group)


def _after_gap(x: Tensor, gap: int) -> Tensor:
    """Return steps ``[T, B]`` after ``gap`` steps of zeros, as a copy."""
    return torch.cat([torch.zeros_like(x[:1]).expand(gap, -1), x])
