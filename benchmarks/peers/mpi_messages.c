/* What calls/rank.py and calls/worlds.py measure, by MPI's point-to-point calls.
 *
 *   mpi_messages pair SOCKET    carries out the orders that calls/rounds.py sends, see orders.h
 *   mpi_messages world BYTES    all ranks exchange BYTES with each other for the first time; rank 0 prints
 *                               {"first": seconds of the slowest, "threads": n, "memory": bytes}
 */
#include <dirent.h>
#include <mpi.h>

#include "orders.h"

static void one(int sender) {
  if (rank == sender)
    MPI_Send(mine, (int)bytes, MPI_BYTE, 1 - sender, 0, MPI_COMM_WORLD);
  else
    MPI_Recv(outs[0], (int)bytes, MPI_BYTE, sender, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void batch(void) {
  MPI_Request requests[64];
  for (int i = 0; i < window; ++i) {
    if (rank == 0)
      MPI_Isend(mine, (int)bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, &requests[i]);
    else
      MPI_Irecv(outs[i], (int)bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, &requests[i]);
  }
  MPI_Waitall(window, requests, MPI_STATUSES_IGNORE);
}

static void forget(void) {}

static long resident(void) { /* bytes */
  long all, here = 0;
  FILE* file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%ld %ld", &all, &here) != 2) MPI_Abort(MPI_COMM_WORLD, 1);
  fclose(file);
  return here * sysconf(_SC_PAGESIZE);
}

static void world(long each) {
  int size, threads = -2; /* . and .. are no threads */
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Request* requests = malloc(sizeof *requests * 2 * (size_t)size);
  char *given = calloc((size_t)size, (size_t)each), *got = malloc((size_t)each * (size_t)size);
  memset(given, 1, (size_t)each * (size_t)size);
  memset(got, 1, (size_t)each * (size_t)size);
  MPI_Barrier(MPI_COMM_WORLD);
  const long before = resident();
  const double begin = seconds(CLOCK_MONOTONIC);
  int n = 0;
  for (int i = 1; i < size; ++i) {
    const int to = (rank + i) % size, from = (rank + size - i) % size;
    MPI_Irecv(got + from * each, (int)each, MPI_BYTE, from, 0, MPI_COMM_WORLD, &requests[n++]);
    MPI_Isend(given + to * each, (int)each, MPI_BYTE, to, 0, MPI_COMM_WORLD, &requests[n++]);
  }
  MPI_Waitall(n, requests, MPI_STATUSES_IGNORE);
  double mine_took = seconds(CLOCK_MONOTONIC) - begin, slowest;
  const long memory = resident() - before;
  MPI_Reduce(&mine_took, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  DIR* tasks = opendir("/proc/self/task");
  while (readdir(tasks)) ++threads;
  if (rank == 0) printf("{\"first\": %.6f, \"threads\": %d, \"memory\": %ld}\n", slowest, threads - 1, memory);
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (argc != 3) MPI_Abort(MPI_COMM_WORLD, 2);
  if (strcmp(argv[1], "world") == 0)
    world(atol(argv[2]));
  else if (!serve(argv[2]))
    MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Finalize();
}
