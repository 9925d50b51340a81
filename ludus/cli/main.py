"""The ``ludus`` command: run a subcommand and turn errors into exit codes."""

from __future__ import annotations

import errno
import importlib
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from ludus import __version__
from ludus.cli import BAD_INPUT, INTERRUPTED
from ludus.containers import signals
from ludus.core.errors import TOO_MANY_FILES, UserError, did_you_mean
from ludus.core.text import printable

COMMANDS = {
    "train": ("ENV", "train an agent on an environment"),
    "resume": ("RUN", "resume a run that was stopped or killed"),
    "evaluate": ("RUN ...", "evaluate trained policies over many episodes"),
    "play": ("RUN", "watch a trained policy in a window or as a video"),
    "record": ("RUN", "write episodes of a trained policy to a dataset"),
    "list": ("[WHAT]", "list agents, networks, environments, presets or runs"),
    "show": ("WHAT ...", "show networks, preprocessing or gradients"),
    "check": ("ENV", "check an environment for problems before training"),
    "diagnose": ("RUN", "show where the NaN or Inf of a failed run came from"),
    "cluster": ("check", "test a Ray cluster before a long run"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an invalid input is one sentence on stderr and code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    signals.exits = argv is None
    if argv is None:  # run as a program
        # an unhandled error, with control characters escaped
        sys.excepthook = lambda *error: sys.stderr.write(printable("".join(traceback.format_exception(*error))))
    try:
        return _dispatch(words)
    except UserError as error:
        print(printable(error.details), end="", file=sys.stderr)
        print(f"ludus: {' '.join(str(error).split())}", file=sys.stderr)  # always one line
        return BAD_INPUT
    except SystemExit as leave:  # after a help text
        if leave.code:
            raise
        return 0
    except KeyboardInterrupt:
        print("\nludus: stopped.", file=sys.stderr)
        return INTERRUPTED
    except (MemoryError, RuntimeError) as error:
        message = str(error)  # "DefaultCPUAllocator: can't allocate memory", "CUDA out of memory"
        if not isinstance(error, MemoryError) and "allocate memory" not in message and "out of memory" not in message:
            raise
        print(f"ludus: There is not enough memory: lower {_memory_settings(words)}.", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # `ludus list environments | head`
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        print(f"ludus: {TOO_MANY_FILES}", file=sys.stderr)
        return BAD_INPUT


def _dispatch(words: list[str]) -> int:
    command = words[0] if words else "--help"
    if command in ("--help", "-h", "help"):
        print(overview())
        return 0
    if command == "--version":
        print(f"ludus {__version__}")
        return 0
    if command not in COMMANDS:
        raise UserError(
            f'Unknown command "{command}".{did_you_mean(command, COMMANDS)} Commands: {", ".join(COMMANDS)}.'
        )
    code: int = importlib.import_module(f"ludus.cli.{command}").run(words[1:])
    return code


def _memory_settings(words: list[str]) -> str:
    """Name the settings to lower if there is not enough memory."""
    names = ["env.num"]
    if words[:1] == ["train"]:
        with suppress(Exception):  # a shorter message is better than none
            settings = importlib.import_module("ludus.cli.train").parse(words[1:]).origins
            names += [name for name in ("agent.rollout", "agent.replay", "agent.batch_size") if name in settings]
    return f"{', '.join(names)} or network.hidden"


def overview() -> str:
    """Return the text of ``ludus --help``."""
    lines = [f"  ludus {name + ' ' + takes:<18} {what}" for name, (takes, what) in COMMANDS.items()]
    return "\n".join(
        [
            f"ludus {__version__}: reinforcement learning in PyTorch.",
            "",
            *lines,
            "",
            "Start with `ludus train CartPole-v1`, then `ludus play latest`.",
            "`ludus COMMAND --help` shows the options of a command.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
