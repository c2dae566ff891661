"""What servers share: who may ask, how long a connection may idle, rewards that clients give."""
