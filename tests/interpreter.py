"""Triton's interpreter (3.6) without what it does again at each call: kernels of the checks take a third of the time.

The interpreter puts its own functions into triton.language when a kernel is launched, and again at every call of a function in
it, several hundred times a program. :func:`quicken` has that done once a launch, and makes types and shapes once. What kernels
compute stays the same, but for one: whole numbers that overflow are not reported. ``KVFOLD_OVERFLOW=1`` has them reported.
"""

import os
from typing import Any


def quicken() -> None:
    """Change the interpreter of this process; a second call changes nothing. Compiled kernels do not meet it."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    if hasattr(interpreter, "quickened"):
        return
    interpreter.quickened = True
    if not os.environ.get("KVFOLD_OVERFLOW"):
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    known, look_up = {}, interpreter._get_np_dtype

    def numpys(type: Any) -> Any:
        """NumPy's type of Triton's, from a table that the interpreter makes at each call."""
        name = type.scalar.name
        if name not in known:
            known[name] = look_up(type)
        return known[name]

    interpreter._get_np_dtype = numpys

    class Launch(interpreter._LangPatchScope):
        """What a launch has put in place; those inside of it find it there."""

        running = False

        def restore(self) -> None:
            super().restore()
            Launch.running = False

    patch, shapes, blocks = interpreter._patch_lang, {}, {}

    def with_shape(self: Any, handle: Any, type: Any) -> None:
        """tl.tensor.__init__, whose wrapped shape is that of all tensors of this shape."""
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.numel, self.shape = shapes[key]

    make = tl.tensor.__init__

    make_block = tl.block_type.__init__

    def of_scalars(self: Any, element_ty: Any, shape: Any) -> None:
        """tl.block_type.__init__, which is that of all blocks of these elements and this shape."""
        if isinstance(element_ty, tl.pointer_type):
            return make_block(self, element_ty, shape)
        key = element_ty.name, *(tl.core._unwrap_if_constexpr(size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    def once(function: Any) -> Any:
        if Launch.running:
            return None
        scope = patch(both)
        scope.set_attr(tl.tensor, "__init__", with_shape)
        scope.set_attr(tl.block_type, "__init__", of_scalars)
        scope.__class__ = Launch
        Launch.running = True
        return scope

    def both() -> None:
        """A function from within which both faces of the language are visible."""

    both = type(both)(both.__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang = once
