"""Keys under learned maps: NOVA-KV."""
