"""What a training run on a split sequence needs besides a model: meshes and FSDP2, recomputation, packed documents,
checkpoints that fit any number of ranks, and FLOPs.

    mesh = TrainingMesh.make("cuda", data=1, fsdp=1, context=4)
    cp = ContextParallel(mesh.context)
    recompute(model, ["gdn", "mlp"])
    shard_parameters(model, mesh, dtype=torch.bfloat16)

`examples/train_hybrid.py` is the whole loop.
"""

from .balance import BalancedSequences
from .checkpoint import Checkpoints
from .clipping import clip_gradients
from .data import Corpus, PackedSequences, batches
from .drawing import draw_hybrid
from .exports import export
from .flops import StepFlops, Work, peak_flops
from .gradients import sum_gradients
from .mesh import TrainingMesh, axis_sizes, shard_parameters
from .offload import Offload
from .optimizers import adamw
from .recompute import attention_kept, recompute

__all__ = [
    "BalancedSequences",
    "Checkpoints",
    "Corpus",
    "Offload",
    "PackedSequences",
    "StepFlops",
    "TrainingMesh",
    "Work",
    "adamw",
    "attention_kept",
    "axis_sizes",
    "batches",
    "clip_gradients",
    "draw_hybrid",
    "export",
    "peak_flops",
    "recompute",
    "shard_parameters",
    "sum_gradients",
]
