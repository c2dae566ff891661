"""GGUF files as they are: llama.cpp samples, nano renders and logs."""
