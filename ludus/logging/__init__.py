"""Metrics, console output, TensorBoard files, videos and hints."""
