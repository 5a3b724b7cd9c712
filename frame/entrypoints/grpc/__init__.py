"""The native API over gRPC (`server.grpc_port`): schema, service, server. Imports grpc only where it is used."""
