"""Containers hold all application state and run the loop; ``build`` makes them from settings."""

CONTAINERS = {  # what ``--container NAME`` looks up
    "local": "ludus.containers.local:LocalWorker",
    "offline": "ludus.containers.offline:OfflineWorker",
    "distrib": "ludus.containers.distrib:DistribWorker",
    "impala": "ludus.containers.impala:ImpalaHost",
}
