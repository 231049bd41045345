"""How much a step computes: the floating-point operations of its matrix products, convolutions and attention."""

from __future__ import annotations

from typing import Any

from amp_track.memory_plan.torch_internals import OpOverload, aten, convolution_flops, registered_flops


def flops_of(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int | None:
    """Return the floating-point operations of one operation: 0 for one that does not count, None if unknown.

    A gradient of a convolution's input or weight takes what the forward pass takes. torch's own formula for both counts
    the weight's once for every group (2.15), 64 times too much for a depthwise convolution of 64 channels.
    """
    try:
        if operation is aten.convolution_backward.default:
            output_gradient, input, weight, transposed, output_mask = args[0], args[1], args[2], args[7], args[10]
            forward = convolution_flops(input.shape, weight.shape, output_gradient.shape, transposed=transposed)
            return forward * (int(output_mask[0]) + int(output_mask[1]))
        return registered_flops(operation, args, kwargs, result)
    except Exception:
        return None  # a formula for arguments that it does not know: memory can be planned without
