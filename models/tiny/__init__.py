"""The embedded tiny model: generator, tokenizer, training, quantiser and their checkpoint."""
