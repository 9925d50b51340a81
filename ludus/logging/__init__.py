"""What a run shows: metrics, console, TensorBoard, videos and hints."""
