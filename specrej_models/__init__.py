"""What both model services share: checkpoints, the network, attention, KV and slots; no grpc."""
