"""Model repositories in object storage: S3 and what speaks its protocol, Google's, Azure's."""
