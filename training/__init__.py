"""How the embedded model was made: stories, chats, tokenizer, network, training, quantiser.

Needs torch; nothing that is installed imports it. Its result is models/tiny/checkpoint.
"""
