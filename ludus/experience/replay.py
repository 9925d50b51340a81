"""Off-policy experience: the last N steps of B environments, drawn at random."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ludus.core.batch import Batch
from ludus.core.cache import ExperienceCache
from ludus.core.hidden_state import HiddenState
from ludus.core.spec import Specs
from ludus.core.step import AgentStep, EnvStep
from ludus.core.types import State, Tensors
from ludus.experience.config import ReplayConfig
from ludus.experience.frames import Frames
from ludus.experience.hindsight import Hindsight, RewardFunction, refuse_hindsight
from ludus.experience.priorities import Priorities
from ludus.experience.reader import Reader
from ludus.experience.ring import Ring
from ludus.experience.row_group import ARRIVAL, FINAL, Arrival, Integers, RowGroup, plain
from ludus.experience.slot_index import SlotIndex
from ludus.experience.space import bytes_needed, free_room, refuse_if_too_large, refuse_too_short

PAUSE = 32  # steps of all rows, while updates are rarer than that, after which the container gets a word in
DUE = 1 - 1e-9  # a credit of 1: ten times 0.1 must do


class ExperienceReplay(ExperienceCache):
    """A ring ``[N, B, …]`` per tensor, in native types, from which transitions or sequences are drawn.

    Reward and endings lie with the observation that they came with, as in EnvStep; where episodes are reset in the same
    step, the last observation of the one that ended lies there too. Only what is real and complete can be drawn: each
    group of rows has a queue of it (see RowGroup), so that no draw is ever rejected. A truncated transition whose last
    observation is not known cannot be drawn, since nothing tells the value of what it led to; in a sequence it counts
    as padding, since the reset has cleared the memory that this value depends on. ``read`` gives memory that the next
    ``read`` uses again. With ``window``, n-step transitions come with the states that they pass.
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
    ) -> None:
        refuse_too_short(config, batch, device)
        refuse_hindsight(config, observation, reward_fn)
        self.bytes = bytes_needed(config, batch, observation, action, state)
        room = free_room(device, config.replay_folder)
        refuse_if_too_large(self.bytes, room, config.replay_folder, device.type)
        self.config, self.batch, self.gamma, self.device = config, batch, gamma, device
        self.length = config.replay // batch
        self._pause = max(1, PAUSE // batch)  # writes
        self.generator: torch.Generator = torch.Generator()
        self.importance_exponent = config.importance_exponent
        self._stride = config.sequence - config.overlap if config.sequence else 1
        self._span = config.burn_in + config.sequence if config.sequence else config.n_step  # transitions of an item
        self._ring = Ring(self.length, batch, device, config.replay_folder)
        self._ring.add(ARRIVAL, (), Arrival.DTYPE)
        self._hidden = Ring(self.length // self._stride + 2, batch, device)  # at the starts of sequences
        self._frames = {
            name: Frames(spec, self.length, batch, self._span, device, config.replay_folder)
            for name, spec in observation.items()
            if spec.stack > 1
        }
        self._plain = [name for name in observation if name not in self._frames]
        self._seen = [f"observation/{name}" for name in self._plain]
        self._said: list[str] = []  # action/… and experience/…: known when the agent has spoken
        self._keys: list[tuple[int, str]] = []  # the same, as places in an AgentStep
        self._drawable = np.zeros((batch, self.length), np.bool_)  # whether the transition that led to a slot can be
        self._places = SlotIndex(self.length, batch)
        self._tracks: dict[int, RowGroup] = {}  # by their first row
        self._priorities = Priorities(self._places, config.priority_exponent) if config.prioritized else None
        self._hindsight = None
        if config.hindsight and reward_fn is not None:
            self._hindsight = Hindsight(config.hindsight, self.length, batch, reward_fn)
        self._real, self._earning, self._reads, self._credit = 0, 0, 0, 0.0
        self._finals = False  # whether last observations of episodes are kept
        kept = self._ring, self._hidden, self._frames, self._hindsight
        self._reader = Reader(config, gamma, list(observation), self._places, *kept, window)

    @property
    def most_bytes(self) -> int:
        """What the replay takes at most: with whole stacks of every observation that is stacked."""
        return self.bytes + sum(frames.bytes_to_keep_whole() - frames.bytes() for frames in self._frames.values())

    @property
    def saved_within_update(self) -> bool:
        """Transitions are complete at any time."""
        return self.config.save_replay

    @property
    def size(self) -> int:
        """How many transitions, or sequences, can be drawn."""
        return sum([group.size for group in self._tracks.values()])

    def env_write(self, step: EnvStep, state: HiddenState, start: int = 0, final_value: Tensor | None = None) -> None:
        """Write observation, reward, endings and ``first`` at the next slot, and let what is complete be drawn."""
        group = self._tracks.get(start) or self._open(step, start)
        group.time += 1
        time, at = group.time, group.at()
        arrays = group.arrays(step, self._plain)
        for target, x in zip(group.heard, arrays, strict=True):
            target[at][...] = x
        fresh, real = arrays[:2] if step.first.is_cpu else (x.cpu().numpy() for x in (step.first, step.real))
        if step.final is not None and not self.config.sequence:
            self._write_final(group, step.final)
        drawable = real
        if not self._finals and 1 in (real & fresh).tobytes():  # truncated, and the last observation is not known
            drawable = real & ~(fresh & ~step.terminated.cpu().numpy())
        self._drawable[group.rows, time % self.length] = drawable
        self._places.now[group.rows] = time
        for name, frames in self._frames.items():
            frames.write(group.all, time, step.observation[name], fresh)
        if self._hindsight is not None:
            self._hindsight.check(start, step, fresh)
            self._hindsight.write(group.all, time, fresh)
        if self.config.sequence and time % self._stride == 0:
            self._remember(group, state)
        self._expire(group)
        for name, frames in self._frames.items():
            if frames.broken and not frames.whole:
                self._keep_whole(name)
                self.on_warning(
                    f'Observation "{name}": a stack of {frames.stack} frames was not the one before it shifted by one, '
                    "as under a wrapper around the frame stack that skips frames. The replay keeps whole stacks and "
                    f"will take {self.bytes / 1e6:,.1f} MB when it is full; with the frame stack as the outermost "
                    "wrapper it stores each frame once."
                )
        if time - self._span >= group.oldest:
            self._offer(group, time - self._span)
        if time:
            self._earn(group, int(np.count_nonzero(real)))

    def agent_write(self, step: AgentStep, start: int = 0) -> None:
        """Write action and experience at the slot of the last observation."""
        group = self._tracks[start]
        at = group.at()
        if not group.said:
            said = {f"action/{name}": x for name, x in step.action.items()}
            for name, x in (said | {f"experience/{k}": x for k, x in step.experience.items()}).items():
                self._ring.add(name, tuple(x.shape[1:]), x.dtype)
            self._listen()
            group.view()
        for (kind, name), target in zip(self._keys, group.said, strict=True):
            target[at][...] = plain(step[kind][name])

    def ready(self) -> bool:
        """Whether an update has been earned."""
        return self._credit >= DUE and self.size > 0

    def accepts(self, start: int) -> bool:
        """Whether these rows may step again; now and then one no lets the container log and heed signals.

        When, follows from what is saved, not from a clock or a signal: schedules move at every pause.
        """
        rare = not self._earning or self.config.updates_per_step * PAUSE < 1
        pauses = rare and self._tracks[start].time % self._pause == 0
        return not pauses and not self.ready()

    def read(self) -> Batch:
        """Draw a batch; it is valid until the next one. ``index`` is on the CPU, where priorities are."""
        self._credit -= 1
        self._reads += 1
        numbers, weight = self._uniform() if self._priorities is None else self._prioritized(self._priorities)
        return self._reader.read(numbers, weight, self.generator)

    def feedback(self, index: Tensor, priority: Tensor) -> None:
        """Take |δ| of what was read; what has expired since is ignored."""
        if self._priorities is None:
            return
        self._priorities.update(index.cpu(), priority.detach().cpu())

    def schedule(self, progress: float) -> None:
        """Let the correction of priorities' bias grow from its first value to all of it."""
        start = self.config.importance_exponent
        self.importance_exponent = start + (1 - start) * progress

    def metrics(self) -> dict[str, float]:
        """Numbers for the log; updates per real step after the warm-up, those included that it waited for a batch."""
        values = {"replay/size": float(self.size)}
        if (past := self._real - self.config.warmup) > 0:
            values["replay/updates_per_step"] = self._reads / past
        if self._priorities is not None:
            values["replay/importance_exponent"] = self.importance_exponent
            values["replay/largest_priority"] = self._priorities.largest
        return values

    def amend(self, step: EnvStep) -> None:
        """Write the last observation of every row again; a transition that led to one that is now lost is no more."""
        for group in self._tracks.values():
            rows, at = step.rows(group.rows), group.at()
            slot, fresh, real = group.time % self.length, rows.first.cpu().numpy(), rows.real.cpu().numpy()
            first, was_real = group.heard[0][at], group.heard[1][at]
            was_fresh = torch.as_tensor(first).cpu().numpy().copy()
            begun = fresh & ~was_fresh
            first[...] = plain(rows.first)
            was_real &= plain(rows.real)
            for name, target in zip(self._plain, group.heard[5:], strict=True):
                target[at][...] = plain(rows.observation[name])
            self._drawable[group.rows, slot] &= real
            for name, frames in self._frames.items():
                frames.amend(group.all, group.time, rows.observation[name], fresh, was_fresh)
            if self._hindsight is not None:
                self._hindsight.write(group.all[begun], group.time, begun[begun])
            if self._span == 1 and not self.config.sequence:
                newest = group.take_back((group.time - 1) * self.batch)
                lost = np.isin(newest % self.batch, group.all[~real])
                group.push(newest[~lost])
                if self._priorities is not None:
                    self._priorities.drop(torch.from_numpy(newest[lost]))
            self._expire(group)

    def state_dict(self) -> State:
        """The filled part of the ring and all counters; without the replay, the last step of each row alone."""
        return {
            "generator": self.generator.get_state(),
            "whole": self.config.save_replay,
            "counters": [self._real, self._earning, self._reads, self._credit],
            "largest": self._priorities.largest if self._priorities is not None else None,
            "groups": [self._save(group) for group in self._tracks.values()],
        }

    def load_state_dict(self, state: State) -> None:
        """Take over what ``state_dict`` gave; time goes on where it was, so that no number comes twice."""
        self.generator.set_state(state["generator"])
        self._tracks = {}
        if state["whole"]:
            self._real, self._earning, self._reads, self._credit = state["counters"]
        if self._priorities is not None:
            self._priorities = Priorities(self._places, self.config.priority_exponent)
            self._priorities.largest = state["largest"] or 1.0  # none: the run had no priorities before
        for saved in state["groups"]:
            self._load(saved)

    def _open(self, step: EnvStep, start: int) -> RowGroup:
        """Make the group of the rows from ``start`` on, at its first write."""
        for name in self._plain:
            x = step.observation[name]
            self._ring.add(f"observation/{name}", tuple(x.shape[1:]), x.dtype)
        return self._add_track(start, start + len(step.first))

    def _add_track(self, start: int, stop: int) -> RowGroup:
        capacity = (stop - start) * (self.length // self._stride + 1)
        self._tracks[start] = group = RowGroup(slice(start, stop), self._ring, capacity, self._seen, self._said)
        self._tracks = dict(sorted(self._tracks.items()))
        return group

    def _listen(self) -> None:
        """Look which columns there are of what the agent says."""
        self._said[:] = [name for name in self._ring.columns if name.startswith(("action/", "experience/"))]
        self._keys = [(int(kind == "experience"), name) for kind, _, name in (x.partition("/") for x in self._said)]

    def _write_final(self, group: RowGroup, final: Tensors) -> None:
        """Keep the last observations of episodes that were reset in the same step."""
        if not self._finals:
            shapes = {name: (tuple(x.shape[1:]), x.dtype) for name, x in final.items()}
            needed = sum(self.batch * self.length * x[0].numel() * x.element_size() for x in final.values())
            room = free_room(self.device, self.config.replay_folder)
            why = "The environments reset in the same step, and keeping the last observations of episodes too "
            refuse_if_too_large(needed, room, self.config.replay_folder, self.device.type, why)
            for name, (shape, dtype) in shapes.items():
                self._ring.add(FINAL + name, shape, dtype)
            self._finals, self.bytes = True, self.bytes + needed
        slot = group.time % self.length
        for name, x in final.items():
            self._ring.columns[FINAL + name][group.rows, slot] = x

    def _remember(self, group: RowGroup, state: HiddenState) -> None:
        """Keep the hidden state with which a sequence starts."""
        for name, x in state.items():
            self._hidden.add(name, tuple(x.shape[1:]), x.dtype)
            self._hidden.columns[name][group.rows, group.time // self._stride % self._hidden.length] = x

    def _expire(self, group: RowGroup) -> None:
        """Let nothing be drawn of which a part has been overwritten."""
        oldest = max(group.oldest, group.time - self.length + 1)
        for frames in self._frames.values():
            oldest = frames.oldest(group.rows, oldest, group.time)
        if oldest > group.oldest:
            group.oldest = self._places.oldest[group.rows] = oldest
            gone = group.expire(oldest * self.batch)
            if self._priorities is not None and gone[0] < gone[1]:
                self._priorities.drop(torch.from_numpy(group.between(*gone)))

    def _keep_whole(self, name: str) -> None:
        """Keep whole stacks of an observation from now on; refuse if there is no room for them."""
        frames, config = self._frames[name], self.config
        for group in self._tracks.values():
            self._expire(group)  # what the smaller stream has overwritten
        needed, total = frames.bytes_to_keep_whole(), self.bytes + frames.bytes_to_keep_whole() - frames.bytes()
        if self.device.type == "cpu" and not config.replay_folder:  # memory is taken only as it is written
            filled = max((min(1.0, group.time / self.length) for group in self._tracks.values()), default=0.0)
            needed = total - int(filled * self.bytes)
        why = (
            f'Observation "{name}": a stack of {frames.stack} frames was not the one before it shifted by one, so the '
            "replay keeps whole stacks, for which "
        )
        refuse_if_too_large(
            needed, free_room(self.device, config.replay_folder), config.replay_folder, self.device.type, why
        )
        frames.keep_whole()
        self.bytes = total

    def _offer(self, group: RowGroup, time: int) -> None:
        """Let what began at ``time`` and is complete now be drawn: real transitions, or sequences."""
        if time % self._stride:
            return
        rows = group.all
        if not self.config.sequence:
            drawable = self._drawable[group.rows, (time + 1) % self.length]
            rows = rows if np.count_nonzero(drawable) == len(rows) else rows[drawable]
        numbers = rows + time * self.batch
        group.push(numbers)
        if self._priorities is not None:
            self._priorities.add(torch.from_numpy(numbers))

    def _earn(self, group: RowGroup, real: int) -> None:
        """Count real transitions; after the warm-up each earns a share of an update."""
        self._real += real
        over = min(real, self._real - self.config.warmup)
        if over > 0 and (self._earning or self._holds_enough(group)):
            self._earning += over
            self._credit += over * self.config.updates_per_step

    def _holds_enough(self, group: RowGroup) -> bool:
        """Whether there is a batch to draw, or the ring is full and will not hold more than it does."""
        return self.size >= self.config.batch_size or group.oldest > group.since

    def _uniform(self) -> tuple[Tensor, None]:
        groups, size = list(self._tracks.values()), self.size
        drawn: Integers = torch.randint(size, (self.config.batch_size,), generator=self.generator).numpy()
        if len(groups) == 1:
            return torch.from_numpy(groups[0].pick(drawn)), None
        numbers, low = np.empty_like(drawn), 0
        for group in groups:
            here = (drawn >= low) & (drawn < low + group.size)
            numbers[here] = group.pick(drawn[here] - low)
            low += group.size
        return torch.from_numpy(numbers), None

    def _prioritized(self, priorities: Priorities) -> tuple[Tensor, Tensor]:
        """Numbers, and (N·P)^−β over the largest of the batch: of N and the sum of all priorities nothing is left."""
        numbers, ratio = priorities.draw(self.config.batch_size, self.generator)
        return numbers, ratio.pow_(-self.importance_exponent)

    def _save(self, group: RowGroup) -> State:
        low = group.oldest if self.config.save_replay else group.time
        rows, numbers = group.rows, group.numbers[: group.size if self.config.save_replay else 0]
        starts = -(-low // self._stride), group.time // self._stride
        return {
            "start": rows.start,
            "stop": rows.stop,
            "time": group.time,
            "low": low,
            "since": group.since if self.config.save_replay else group.time,
            "steps": self._ring.save(rows, low, group.time),
            "hidden": self._hidden.save(rows, *starts) if starts[0] <= starts[1] else {},
            "frames": {name: frames.save(rows, low, group.time) for name, frames in self._frames.items()},
            "numbers": torch.from_numpy(numbers),
            "priorities": None if self._priorities is None else self._priorities.get(torch.from_numpy(numbers)),
        }

    def _load(self, saved: State) -> None:
        group, time = self._add_track(saved["start"], saved["stop"]), saved["time"]
        rows = group.rows
        self._ring.load(rows, time, saved["steps"])
        self._hidden.load(rows, time // self._stride, saved["hidden"])
        for name, frames in self._frames.items():
            if saved["frames"][name].get("whole") and not frames.whole:
                self._keep_whole(name)
            frames.load(rows, time, saved["frames"][name])
        self._listen()
        group.time, group.since, group.oldest = time, saved["since"], saved["low"]
        self._places.now[rows], self._places.oldest[rows] = time, saved["low"]
        arrival = Arrival(self._ring.columns[ARRIVAL])
        first, real, terminated = (x[rows].cpu().numpy() for x in (arrival.first, arrival.real, arrival.terminated))
        self._finals = any(name.startswith(FINAL) for name in self._ring.columns)
        self._drawable[rows] = real if self._finals else real & ~(first & ~terminated)
        if self._hindsight is not None:
            times = np.arange(max(saved["low"], time - self.length + 1), time + 1)
            self._hindsight.restore(rows, int(times[0]), first[:, times % self.length])
        numbers, priorities = saved["numbers"].numpy(), saved["priorities"]
        kept = numbers >= (time - self.length + 1) * self.batch  # this ring may be shorter
        numbers = numbers[kept]
        group.push(numbers)
        if self._priorities is not None:
            if priorities is None:
                self._priorities.add(torch.from_numpy(numbers))
            else:
                self._priorities.set(torch.from_numpy(numbers), priorities[torch.from_numpy(kept)])
        self._expire(group)
