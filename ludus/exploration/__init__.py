"""Exploration: ε-greedy actions, noise on actions, noise on parameters.

Schedules depend only on the fraction of the run that is done. Error messages name the agents' settings, which have the
prefixes ``epsilon_``, ``noise_`` and ``parameter_noise_``.
"""
