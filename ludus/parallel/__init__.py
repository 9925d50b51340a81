"""Supervised processes and shared memory. Imports only numpy and the standard library."""
