"""The own engine: sessions of candidates over one model of transformers; no grpc."""
