"""Exploration: ε-greedy actions, noise on actions, noise on parameters. The table is what ``agent.noise`` looks up.

Schedules depend only on the fraction of the run that is done. Error messages name the agents' settings, which have the
prefixes ``epsilon_``, ``noise_`` and ``parameter_noise``.
"""

NOISES = {
    "normal": "ludus.exploration.action_noise:NormalNoise",
    "clipped_normal": "ludus.exploration.action_noise:ClippedNormalNoise",
    "uniform": "ludus.exploration.action_noise:UniformNoise",
    "ornstein_uhlenbeck": "ludus.exploration.action_noise:OrnsteinUhlenbeckNoise",
}
