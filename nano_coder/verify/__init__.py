"""Whether a logged run may train a policy gradient: by its columns, its tokens and its weights."""
