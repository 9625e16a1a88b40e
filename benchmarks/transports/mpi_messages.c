/* What rank.py and worlds.py measure, by MPI's point-to-point calls.
 *
 *   mpi_messages pair SOCKET    carries out the orders that pair.py sends, of a rank each:
 *                               WHAT BYTES WINDOW COUNT, where WHAT is check, latency or stream
 *   mpi_messages world BYTES    all ranks exchange BYTES with each other for the first time; rank 0 prints
 *                               {"first": seconds of the slowest, "threads": n, "memory": bytes}
 */
#include <dirent.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static int rank, window;
static long bytes;
static int *mine, **outs; /* one buffer to send from; as many to receive into as messages are in flight */

static double seconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

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

static void prepare(void) {
  static int had;
  for (int i = 0; i < had; ++i) free(outs[i]);
  free(outs);
  free(mine);
  mine = malloc((size_t)bytes);
  for (long i = 0; i < bytes / 4; ++i) mine[i] = (int)i + rank;
  had = rank == 1 ? window : 1;
  outs = malloc(sizeof *outs * (size_t)had);
  for (int i = 0; i < had; ++i) memset(outs[i] = malloc((size_t)bytes), 0, (size_t)bytes);
}

static int right(void) {
  for (int o = 0; o < (rank == 1 ? window : 1); ++o)
    for (long i = 0; i < bytes / 4; ++i)
      if (outs[o][i] != (int)i + 1 - rank) return 0;
  return 1;
}

static void pair(const char *path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  strncpy(address.sun_path, path, sizeof address.sun_path - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) MPI_Abort(MPI_COMM_WORLD, 1);
  FILE *in = fdopen(fd, "r");
  dprintf(fd, "%d\n", rank);
  char what[16];
  int count;
  while (fscanf(in, "%15s %ld %d %d", what, &bytes, &window, &count) == 4) {
    if (strcmp(what, "check") == 0) {
      prepare();
      for (int i = 0; i < 2; ++i) one(0), one(1), batch();
      dprintf(fd, right() ? "right\n" : "wrong values\n");
      continue;
    }
    one(0), one(1); /* begins when both are here */
    const double begin = seconds(CLOCK_MONOTONIC), used = seconds(CLOCK_PROCESS_CPUTIME_ID);
    if (strcmp(what, "latency") == 0) {
      for (int i = 0; i < count; ++i) one(0), one(1);
    } else {
      for (int i = 0; i < count; ++i) batch();
      one(1); /* so that rank 0 ends when all has arrived */
    }
    const double cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - used;
    dprintf(fd, "%.9f %.9f\n", seconds(CLOCK_MONOTONIC) - begin, cpu);
  }
}

static long resident(void) { /* bytes */
  long all, here = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (!file || fscanf(file, "%ld %ld", &all, &here) != 2) MPI_Abort(MPI_COMM_WORLD, 1);
  fclose(file);
  return here * sysconf(_SC_PAGESIZE);
}

static void world(long each) {
  int size, threads = -2; /* . and .. are no threads */
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Request *requests = malloc(sizeof *requests * 2 * (size_t)size);
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
  DIR *tasks = opendir("/proc/self/task");
  while (readdir(tasks)) ++threads;
  if (rank == 0)
    printf("{\"first\": %.6f, \"threads\": %d, \"memory\": %ld}\n", slowest, threads - 1, memory);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (argc != 3) MPI_Abort(MPI_COMM_WORLD, 2);
  if (strcmp(argv[1], "pair") == 0)
    pair(argv[2]);
  else
    world(atol(argv[2]));
  MPI_Finalize();
}
