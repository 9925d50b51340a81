"""What acting does to learn more than greed would show it: ε-greedy choices, noise on actions, noise on parameters.

How strong each is follows the share of the run that is done and nothing else, so a resumed run goes on where it was.
Settings carry the prefixes ``epsilon_``, ``noise_`` and ``parameter_noise_``, by which errors name them.
"""
