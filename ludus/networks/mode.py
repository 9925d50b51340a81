"""Whether a module computes something else in training mode than in evaluation mode."""

from __future__ import annotations

from torch import nn

SAME_IN_BOTH = (nn.Linear, nn.Conv2d, nn.LSTMCell, nn.ModuleList, nn.ModuleDict)  # what Ludus's own networks hold


def depends_on_mode(module: nn.Module) -> bool:
    """Return whether ``train()`` may change what the module computes, as it does for BatchNorm and Dropout.

    Ludus's own modules and the layers that they hold do not look at the mode; of any other class it is assumed.
    """
    return any(type(m) not in SAME_IN_BOTH and type(m).__module__.split(".")[0] != "ludus" for m in module.modules())
