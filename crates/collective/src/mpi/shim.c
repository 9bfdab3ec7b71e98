/* The few calls of MPI that a group of ranks needs, with constants that are macros in C as plain numbers.
 *
 * Buffers are worked on in place. Counts are ints in MPI: the caller cuts larger buffers. Every function returns
 * MPI's error code, 0 for success; errors are returned and not fatal. */
#include <mpi.h>
#include <stddef.h>

typedef void (*polyreme_reducer)(void *from, void *to, int *count, MPI_Datatype *type);

/* Half-precision types are two bytes to MPI; their sums are the caller's functions. */
static MPI_Datatype half_type;
static MPI_Op half_ops[2][3];

static MPI_Datatype type_of(int dtype) {
    switch (dtype) {
    case 0: return MPI_FLOAT;
    case 1: return MPI_DOUBLE;
    case 2: return half_type;
    case 3: return half_type;
    case 4: return MPI_INT32_T;
    case 5: return MPI_INT64_T;
    case 7: return MPI_INT8_T;
    default: return MPI_UINT8_T;
    }
}

static MPI_Op op_of(int dtype, int reduce) {
    static const int sum = 0, max = 1;
    if (dtype == 2 || dtype == 3) return half_ops[dtype - 2][reduce];
    /* Truth values: of bytes that are zero or not, the largest says whether any is true. */
    if (dtype == 8 && reduce == sum) return MPI_MAX;
    return reduce == sum ? MPI_SUM : reduce == max ? MPI_MAX : MPI_MIN;
}

int polyreme_mpi_init(polyreme_reducer reducers[6], int *rank, int *size) {
    int initialized = 0, level = 0;
    int error = MPI_Initialized(&initialized);
    if (error) return error;
    /* Calls come from one thread at a time. */
    if (!initialized && (error = MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &level))) return error;
    if (!initialized && level < MPI_THREAD_SERIALIZED) return MPI_ERR_OTHER;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if ((error = MPI_Type_contiguous(2, MPI_BYTE, &half_type))) return error;
    if ((error = MPI_Type_commit(&half_type))) return error;
    for (int k = 0; k < 6; k++)
        if ((error = MPI_Op_create(reducers[k], 1, &half_ops[k / 3][k % 3]))) return error;
    if ((error = MPI_Comm_rank(MPI_COMM_WORLD, rank))) return error;
    return MPI_Comm_size(MPI_COMM_WORLD, size);
}

int polyreme_mpi_finalize(void) {
    int finalized = 0;
    MPI_Finalized(&finalized);
    return finalized ? 0 : MPI_Finalize();
}

void polyreme_mpi_abort(int code) { MPI_Abort(MPI_COMM_WORLD, code); }

int polyreme_mpi_error_text(int error, char *text, int *len) { return MPI_Error_string(error, text, len); }

int polyreme_mpi_error_text_max(void) { return MPI_MAX_ERROR_STRING; }

int polyreme_mpi_barrier(void) { return MPI_Barrier(MPI_COMM_WORLD); }

int polyreme_mpi_all_reduce(void *data, int count, int dtype, int reduce) {
    return MPI_Allreduce(MPI_IN_PLACE, data, count, type_of(dtype), op_of(dtype, reduce), MPI_COMM_WORLD);
}

int polyreme_mpi_reduce_scatter(const void *data, void *own, const int *counts, int dtype, int reduce) {
    return MPI_Reduce_scatter(data, own, counts, type_of(dtype), op_of(dtype, reduce), MPI_COMM_WORLD);
}

int polyreme_mpi_all_gather(void *data, const int *counts, const int *starts, int dtype) {
    return MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data, counts, starts, type_of(dtype), MPI_COMM_WORLD);
}

int polyreme_mpi_broadcast(void *data, int count, int dtype, int root) {
    return MPI_Bcast(data, count, type_of(dtype), root, MPI_COMM_WORLD);
}

int polyreme_mpi_gather(const void *mine, int count, void *into, const int *counts, const int *starts, int dtype,
                        int root) {
    MPI_Datatype type = type_of(dtype);
    return MPI_Gatherv(mine, count, type, into, counts, starts, type, root, MPI_COMM_WORLD);
}

int polyreme_mpi_scatter(void *mine, int count, const void *from, const int *counts, const int *starts, int dtype,
                         int root) {
    MPI_Datatype type = type_of(dtype);
    return MPI_Scatterv(from, counts, starts, type, mine, count, type, root, MPI_COMM_WORLD);
}

int polyreme_mpi_all_to_all(const void *send, const int *send_counts, const int *send_starts, void *recv,
                            const int *recv_counts, const int *recv_starts, int dtype) {
    MPI_Datatype type = type_of(dtype);
    return MPI_Alltoallv(send, send_counts, send_starts, type, recv, recv_counts, recv_starts, type, MPI_COMM_WORLD);
}

int polyreme_mpi_send(const void *data, int count, int dtype, int to) {
    return MPI_Send(data, count, type_of(dtype), to, 7, MPI_COMM_WORLD);
}

int polyreme_mpi_recv(void *data, int count, int dtype, int from) {
    return MPI_Recv(data, count, type_of(dtype), from, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}
