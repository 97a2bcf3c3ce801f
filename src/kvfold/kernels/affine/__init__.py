"""Affine groups: KIVI and SQuat, and InnerQ as its paper has it. ``decode`` reads the order of tensor cores, ``row_major`` and
``tiles`` plain order."""
