"""Pure functions on tensors: time-major inputs, unreduced outputs."""
