"""What launchers ask before they launch.

Knows devices and the interpreter; must not know operators.
"""

import triton
import triton.language as tl
from torch import Tensor

from deepinfer.errors import Unsupported

INTERPRETED: bool = triton.knobs.runtime.interpret

# Operands of matrix products: the interpreter cannot multiply bf16, whose values are exact in fp32.
DOT_DTYPE = tl.float32 if INTERPRETED else tl.bfloat16


def require_gpu(x: Tensor) -> None:
    """Refuse tensors that no kernel can reach.

    Raises:
        Unsupported: `x` is on the CPU and the interpreter is off.
    """
    if not INTERPRETED and x.device.type != "cuda":
        raise Unsupported(f"needs a CUDA GPU, and the tensors are on {x.device}")
