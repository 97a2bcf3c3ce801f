"""Rotated and balanced tiles: KVarN; their encoder puts keys under learned maps as well."""
