"""The native API over gRPC (`server.grpc_port`): schema, service, server. Only this package imports
grpc."""
