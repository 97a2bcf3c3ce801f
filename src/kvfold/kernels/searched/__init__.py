"""Encoders of what is searched for: codes of vectors (VQLLM, GSRQ, TaSQ), outliers (KVQuant), rotated and balanced tiles
(KVarN, values of NOVA-KV), keys under learned maps (NOVA-KV). Other folders decode them, ``generic`` most of them."""
