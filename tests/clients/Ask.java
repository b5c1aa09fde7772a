// What Java's own client sends by default: each request without TLS asks for an upgrade to HTTP/2.
import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.concurrent.CompletableFuture;
import java.util.stream.IntStream;
import java.util.stream.Stream;

public class Ask {
    static final String URL = System.getenv("CLIENT_SERVER_URL");
    static final String KEY = System.getenv("CLIENT_API_KEY");

    static HttpRequest.Builder to(String path) {
        HttpRequest.Builder builder = HttpRequest.newBuilder(URI.create(URL + path));
        return builder.header("Authorization", "Bearer " + KEY).header("Content-Type", "application/json");
    }

    static BodyPublisher text(String more) {
        return BodyPublishers.ofString("{\"prompt\": \"Tom has 3 apples\", \"max_tokens\": 8, \"temperature\": 0" + more + "}");
    }

    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 0; i < 3; i++) {
            HttpResponse<String> told = client.send(to("/v1/completions").POST(text("")).build(), BodyHandlers.ofString());
            System.out.println("whole " + told.statusCode() + " " + told.version());
        }
        byte[] bytes = "{\"prompt\": \"Tom\", \"max_tokens\": 2}".getBytes();
        BodyPublisher chunked = BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(bytes));
        System.out.println("chunked " + client.send(to("/v1/completions").POST(chunked).build(), BodyHandlers.ofString()).statusCode());
        System.out.println("get " + client.send(to("/v1/models").GET().build(), BodyHandlers.ofString()).statusCode());
        HttpResponse<Stream<String>> lines = client.send(to("/v1/completions").POST(text(", \"stream\": true")).build(), BodyHandlers.ofLines());
        System.out.println("stream " + lines.body().filter(line -> line.equals("data: [DONE]")).count());
        var together = IntStream.range(0, 8).mapToObj(i -> client.sendAsync(to("/v1/completions").POST(text("")).build(), BodyHandlers.ofString())).toList();
        System.out.println("together " + together.stream().map(CompletableFuture::join).filter(told -> told.statusCode() == 200).count());
    }
}
