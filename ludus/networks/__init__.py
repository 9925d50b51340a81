"""Networks: named tensors in, named tensors out. The tables map names on the command line to classes."""

NETWORKS = {
    "modular": "ludus.networks.modular:ModularNetwork",
}

SUBMODULES = {
    "identity1d": "ludus.networks.identity:Identity1D",
    "identity2d": "ludus.networks.identity:Identity2D",
    "identity3d": "ludus.networks.identity:Identity3D",
    "identity4d": "ludus.networks.identity:Identity4D",
    "lstm": "ludus.networks.net1d.lstm:LSTM",
    "flat_mlp": "ludus.networks.net2d.flat_mlp:FlatMLP",
    "mlp": "ludus.networks.net1d.mlp:MLP",
    "small_cnn": "ludus.networks.net3d.small_cnn:SmallCNN",
    "nature_cnn": "ludus.networks.net3d.nature_cnn:NatureCNN",
}
