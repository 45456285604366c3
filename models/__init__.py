"""What a network is, from a checkpoint folder to a graph.

    config/      config.json, read once into a frozen dataclass
    checkpoint/  the tensors a network lists, how each is stored, its files
    weights/     recipes: from stored tensors to the operands of ops
    graph/       blocks: tensors, and how they are written in ops
    families/    one folder a model family: its configuration, its network, its tensors' names

`open_model.py` opens a checkpoint; `build_network.py` writes its graph.
"""
