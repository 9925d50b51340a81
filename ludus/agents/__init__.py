"""One file per algorithm. The table below is what ``--agent NAME`` looks up."""

AGENTS = {
    "a2c": "ludus.agents.actor_critic:ActorCritic",
    "ppo": "ludus.agents.ppo:PPO",
}
