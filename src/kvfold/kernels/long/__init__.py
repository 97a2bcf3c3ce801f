"""Calls of many tokens: bounded pieces are unpacked for the platform's flash attention."""
