"""For a setting that an agent lacks: which agents have it. Only a mistake imports this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ludus.agents import AGENTS
from ludus.core.errors import UserError, nearest
from ludus.settings.settings import agent_config, setting_types


def agents_with_setting(key: str, agent: str) -> str:
    """Say that ``agent`` lacks a setting, and who has it, one name for each algorithm; nothing where nobody has."""
    if not key.startswith("agent."):
        return ""
    first = {kind: name for name, kind in reversed(AGENTS.items())}  # of the names of one algorithm
    having = [name for name in AGENTS if name in first.values() and key in setting_types(agent_config(name))]
    if not having:
        return ""
    return f"{agent} has no such setting; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it"


def unknown(key: str, origin: str, agent: str, types: Mapping[str, Any]) -> UserError:
    """The error for a key that is none of the settings in ``types``, with what was likely meant."""
    who = agents_with_setting(key, agent)
    return UserError(f'There is no setting "{key}" ({origin}){f": {who}." if who else f".{nearest(key, types)}"}')
