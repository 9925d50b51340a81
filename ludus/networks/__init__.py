"""Networks: named tensors in, named tensors out. The tables map names on the command line to classes."""

NETWORKS = {
    "modular": "ludus.networks.modular:ModularNetwork",
}

SUBMODULES = {
    "identity1d": "ludus.networks.identity:Identity1D",
    "mlp": "ludus.networks.net1d.mlp:MLP",
    "residual_mlp": "ludus.networks.net1d.residual_mlp:ResidualMLP",
    "noisy_linear": "ludus.networks.net1d.noisy_linear:NoisyLayer",
    "lstm": "ludus.networks.net1d.lstm:LSTM",
    "layer_norm_lstm": "ludus.networks.net1d.layer_norm_lstm:LayerNormLSTM",
    "gru": "ludus.networks.net1d.gru:GRU",
    "min_gru": "ludus.networks.net1d.min_gru:MinGRU",
    "gtrxl": "ludus.networks.net1d.gtrxl:GTrXL",
    "identity2d": "ludus.networks.identity:Identity2D",
    "flat_mlp": "ludus.networks.net2d.flat_mlp:FlatMLP",
    "entity_mlp": "ludus.networks.net2d.deep_sets:EntityMLP",
    "deep_sets": "ludus.networks.net2d.deep_sets:DeepSets",
    "attention_pool": "ludus.networks.net2d.attention_pool:AttentionPool",
    "transformer_enc": "ludus.networks.net2d.transformer:TransformerEnc",
    "transformer_dec": "ludus.networks.net2d.transformer:TransformerDec",
    "conv1d": "ludus.networks.net2d.conv1d:Conv1D",
    "identity3d": "ludus.networks.identity:Identity3D",
    "small_cnn": "ludus.networks.net3d.small_cnn:SmallCNN",
    "mnih2013": "ludus.networks.net3d.nature_cnn:Mnih2013",
    "nature_cnn": "ludus.networks.net3d.nature_cnn:NatureCNN",
    "four_conv": "ludus.networks.net3d.four_conv:FourConv",
    "impala_cnn": "ludus.networks.net3d.impala_cnn:ImpalaCNN",
    "resnet18": "ludus.networks.net3d.resnet:ResNet18",
    "resnet50": "ludus.networks.net3d.resnet:ResNet50",
    "sc2le_encoder": "ludus.networks.net3d.sc2le:SC2LEEncoder",
    "sc2le_decoder": "ludus.networks.net3d.sc2le:SC2LEDecoder",
    "conv_lstm": "ludus.networks.net3d.conv_lstm:ConvLSTM",
    "spatial_attention": "ludus.networks.net3d.spatial_attention:SpatialAttention",
    "identity4d": "ludus.networks.identity:Identity4D",
    "conv3d": "ludus.networks.net4d.conv3d:Conv3D",
}
