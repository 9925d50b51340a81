"""What is written after stepping and read before learning."""
