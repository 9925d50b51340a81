"""The settings of a network whose inputs meet before its first layer."""

from __future__ import annotations

from dataclasses import replace

from ludus.networks.config import NetworkConfig


def joined(config: NetworkConfig) -> NetworkConfig:
    """The same pieces, but what vectors would go through one by one they go through together.

    A critic Q(s, a) needs that: where observation and action have a layer each and are then added up by a linear one,
    the best action does not depend on the observation. Images still have their sources. The joined features go through
    the body, if one is set, else through ``net1d``; an mlp follows where these are something else, such as an lstm.
    """
    if config.body not in ("auto", "identity1d"):
        body, head = config.body, "mlp"
    elif config.net1d in ("identity1d", "mlp"):
        body, head = "mlp", "identity1d"
    else:
        body, head = config.net1d, "mlp"
    return replace(config, net1d="identity1d", body=body, head=head if config.head == "identity1d" else config.head)
