"""The embedded tiny model: its generator, tokenizer, training, quantiser, and the checkpoint they made."""
