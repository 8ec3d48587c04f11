"""Weights of a model whose parameters are sharded by FSDP2: read, drawn and written in Transformers' own format.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shard_parameters(parallelize(model, cp), mesh, blocks=model.model.layers, methods=())
    load_weights(model, "folder/with/safetensors")        # or draw_weights(model)
    save_weights(model, "out")                            # what from_pretrained reads, from any split

No rank ever has the whole model. Names, stacked experts and dtypes are Transformers' own conversions (`conversions`). A
rank reads the slices of its shards (`reading`), by the library's shard-on-read; what a conversion mixes along the
sharded dimension (the convolutions of Kimi-Linear) it reads whole, one parameter at a time. Writing (`writing`), ranks
gather a layer at a time, and each file has one rank that keeps it until it is full. `files` knows a folder of
safetensors, `parts` a rank's part of a parameter.
"""

from .drawing import draw_weights
from .files import folder_of
from .reading import load_weights
from .writing import save_weights

__all__ = ["draw_weights", "folder_of", "load_weights", "save_weights"]
