"""What several families share: PTX, tensor-core operands, softmax, windows, parts and their merge, encoding of tiles."""
