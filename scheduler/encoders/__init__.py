"""What encoders have made of images, of sounds or of another text, for models that have one."""
