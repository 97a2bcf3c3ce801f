"""Pages of affine groups or of signs of a sketch as operands of tensor cores (InnerQ, QJL); encoders of ZipCache and GEAR."""
