"""What a network is, from a checkpoint folder to a graph.

    config/      config.json, read once into a frozen dataclass
    checkpoint/  the tensors a network lists, how each is stored, the files they lie in
    weights/     recipes: from stored tensors to the operands of ops
    graph/       blocks: tensors, and how they are written in ops
    families/    one folder a model family: its configuration, its network, its tensors' names

`open_model.py` goes the first half of the way, `build_network.py` the second.
"""
