"""The encoder of rotated and balanced tiles (KVarN), which puts keys under learned maps as well (NOVA-KV)."""
