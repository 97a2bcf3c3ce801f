"""Pages of any other codes as operands of tensor cores: InnerQ and QJL; TurboQuant, GEAR, ZipCache and KVQuant."""
