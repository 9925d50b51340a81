"""The mathematics: pure functions on tensors, time-major in, unreduced out. Nothing is imported here."""
