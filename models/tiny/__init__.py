"""The embedded model: a small hybrid MoE, its corpus, training and quantiser."""
