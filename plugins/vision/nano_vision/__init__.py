"""Images for models that see: files, the tool `view_image`, and local vision-language models."""
