"""What executions that lie in logs can teach: admission, age, and what each training took of them."""
