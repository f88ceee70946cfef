"""The released checkpoint format: config.json, tokenizer.json and safetensors, read and written."""
